"""Load on a fleet, for scripts/loadtest.py and the scripts that do harm under load.

mix.py        which requests: the `[load]` table of a TOML file
trace.py      the same from a file of earlier ones
arrivals.py   when: Poisson, bursts
target.py     where: a running fleet, or one of its own
drive.py      asks them and notes what happens
asked.py      one request and what came of it
verify.py     every token against the engine alone
slo.py        what was in time; the highest rate that is
report.py, text.py, plots.py   what it all says
"""
