"""Which of the processes that a launcher started this one is."""

from __future__ import annotations

import pytest

from data_prep.errors import DataError
from data_prep.tokenizing.ranks import Rank, find_rank


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ("", Rank(0, 1, 1)),
        ("RANK=3 WORLD_SIZE=8 LOCAL_WORLD_SIZE=4", Rank(3, 8, 4)),  # torchrun
        ("RANK=3 WORLD_SIZE=8 LOCAL_SIZE=4 LOCAL_RANK=3", Rank(3, 8, 4)),  # deepspeed
        ("RANK=1 WORLD_SIZE=3", Rank(1, 3, 1)),  # by hand
        ("SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=7 SLURM_STEP_TASKS_PER_NODE=2(x3),1 SLURM_NTASKS=9", Rank(5, 7, 2)),
        ("SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_JOB_ID=1", Rank(0, 1, 1)),  # in a batch script, outside any step
        ("OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=1", Rank(1, 2, 1)),
        ("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALNRANKS=2", Rank(1, 2, 2)),
    ],
)
def test_each_launcher_is_understood(environment: str, rank: Rank) -> None:
    assert find_rank(dict(pair.split("=") for pair in environment.split())) == rank


@pytest.mark.parametrize("rank", ["2", "-1", "one"])
def test_a_rank_that_cannot_be_is_refused(rank: str) -> None:
    with pytest.raises(DataError, match="RANK"):
        find_rank({"RANK": rank, "WORLD_SIZE": "2", "LOCAL_SIZE": "2"})
