"""Affinity: disjoint processors where there are enough, whole cores where possible, and named refusals."""

from __future__ import annotations

import os

import pytest

from tinyloop_serve.deploy import processors
from tinyloop_serve.deploy.plan import Plan


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2, 3, 4, 5, 6, 7, 8})


def alone(cpu: int) -> tuple[int, int]:
    return (0, cpu)


def paired(cpu: int) -> tuple[int, int]:
    """1 and 5 are one core, 2 and 6 the next."""
    return (0, (cpu - 1) % 4)


@pytest.mark.usefixtures("eight")
def test_replicas_get_disjoint_processors() -> None:
    assert processors.divide("auto", 2, 4, alone) == ["1,2,3,4", "5,6,7,8"]
    assert processors.divide("auto", 3, 2, alone) == ["1,2", "3,4", "5,6"]
    assert processors.divide("5,1-3", 2, 2, alone) == ["5,1", "2,3"]


@pytest.mark.usefixtures("eight")
def test_a_thread_gets_a_core_where_there_are_enough_and_a_replica_whole_cores_where_not() -> None:
    assert processors.divide("auto", 2, 2, paired) == ["1,2", "3,4"]
    assert processors.divide("auto", 2, 4, paired) == ["1,5,2,6", "3,7,4,8"]


@pytest.mark.usefixtures("eight")
def test_too_few_processors_are_shared() -> None:
    assert processors.divide("auto", 3, 3, alone) == ["none"] * 3
    assert processors.divide("1,2", 2, 2, alone) == ["none"] * 2
    assert processors.divide("none", 2, 1, alone) == ["none"] * 2


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize("text", ["", "x", "0", "1,1", "3-1", "1-", "-1", "1,", "1 ", "1-9", "+1", "\u0663"])
def test_a_wrong_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="of this process: 1,2,3,4,5,6,7,8"):
        processors.named_cpus(text)


@pytest.mark.usefixtures("eight")
def test_default_threads_divide_the_processors() -> None:
    assert Plan("m", "e", replicas=2).threads_each() == 4
    assert Plan("m", "e", replicas=2, affinity="1-6").threads_each() == 3
    assert Plan("m", "e", replicas=2, affinity="none").threads_each() == 4
    assert Plan("m", "e", replicas=20).threads_each() == 1


def test_every_processor_of_this_machine_has_a_core() -> None:
    assert all(len(processors.core_of(cpu)) == 2 for cpu in os.sched_getaffinity(0))
    assert processors.core_of(10**6) == (0, 10**6)
