"""Load and harm for a fleet, shared by the scripts that prove what it survives."""
