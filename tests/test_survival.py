"""Failures that Offbeat survives, and others that it does not: the list of docs/failures.md."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from pages import DOCS

TESTS = Path(__file__).parent


class Row(NamedTuple):
    """One row of the table, and the test that proves it."""

    what: str
    noticed: str
    others: str
    left: str
    test: str


LIVES = "their own models, whole; the last checkpoint"
ROWS = [
    Row(
        "a worker is killed (out of memory, `kill -9`)",
        "at once",
        "`CommunicationError: … lost the connection to rank 1, which died or was cut off`",
        LIVES,
        "training/test_failures.py::test_a_dead_worker_is_named_by_every_survivor_within_seconds",
    ),
    Row(
        "an exception leaves `with attach(...)` on one worker, or it calls `detach()`",
        "at once, and within about 2 s by workers that wait for a busy one",
        "`CommunicationError: … rank 1, which gave up`",
        LIVES,
        "elastic/test_leaving.py::test_all_workers_notice_that_one_gives_up",
    ),
    Row(
        "Ctrl-C on one worker",
        "on that worker within about 0.1 s, in every wait",
        "`CommunicationError: … rank 0, which gave up`, as its process ends or detaches",
        LIVES,
        "elastic/test_leaving.py::test_ctrl_c_interrupts_every_wait",
    ),
    Row(
        "a parameter server is killed",
        "at once",
        "`CommunicationError: … rank 0, which died or was cut off`",
        "no copy of its shard; the last checkpoint",
        "baselines/test_parameter_server.py::test_a_dead_worker_is_named_at_once",
    ),
    Row(
        "a client of a parameter server is killed, while the server's worker computes",
        "at once",
        "`CommunicationError: … rank 3, which died or was cut off`",
        LIVES,
        "elastic/test_leaving.py::test_the_death_of_a_client_of_a_busy_server_is_noticed",
    ),
    Row(
        "a worker is stopped (SIGSTOP), stuck, or cut off silently",
        "after `timeout_seconds`, and up to 3 s more; 4 s if it keeps the store",
        "`CommunicationTimeout: … no answer from rank 1`",
        LIVES,
        "training/test_failures.py::test_a_stopped_worker_is_named_after_the_time_out",
    ),
    Row(
        "a worker is slow, by less than `timeout_seconds`",
        "not",
        "they wait if the strategy requires it",
        "training continues",
        "transport/test_faults.py::test_real_workers_wait_for_a_delayed_one",
    ),
    Row(
        "a worker does not call `attach`",
        "after `timeout_seconds`; at once if another one gives up before",
        "`CommunicationTimeout: … rank 1 did not come`",
        "training has not started",
        "transport/test_failures.py::test_a_worker_that_does_not_open_its_connections_is_named",
    ),
    Row(
        "a worker is killed, with `min_workers=1`",
        "at once",
        "they continue from the common state, with means over the remaining workers",
        "all but the steps that the lost worker had not contributed",
        "elastic/test_elastic_processes.py::test_training_survives_a_death_and_a_join",
    ),
    Row(
        "a worker is stopped or cut off for too long, with the same setting",
        "after `timeout_seconds`",
        "they continue; it raises `CommunicationError: … left behind` when it comes back",
        "the same",
        "elastic/test_membership.py::test_a_stopped_worker_is_left_behind",
    ),
    Row(
        "more are lost than `min_workers` allows",
        "as above",
        "`CommunicationError: … min_workers=3`",
        LIVES,
        "elastic/test_elastic.py::test_too_few_workers_raise_one_error",
    ),
    Row(
        "NaN or infinity in one worker's model or gradients",
        "before the next mean, or push",
        "`OffbeatError: rank 1 would contribute NaN …`; or `… which gave up`, after others",
        LIVES,
        "training/test_non_finite.py::test_by_default_all_workers_raise_before_the_mean",
    ),
    Row(
        'the same with `non_finite="warn"`',
        "at the next mean, or push; a warning names the rank",
        "NaN from then on",
        "the last checkpoint",
        "training/test_non_finite.py::test_a_warning_is_logged_once",
    ),
    Row(
        'the same with `non_finite="exclude"`',
        "at the next mean; a warning names the rank",
        "the mean of the others, which that worker receives, too",
        "training continues",
        "training/test_non_finite.py::test_an_excluded_worker_changes_no_mean",
    ),
    Row(
        "a worker is killed while checkpoints are written",
        "at once",
        "`CommunicationError: … rank 1, which died or was cut off`",
        "this checkpoint or the one before, on all workers; none if it is the first",
        "checkpoint/test_checkpoints.py::test_a_killed_writer_leaves_this_checkpoint_or_the_one_before",
    ),
    Row(
        "a worker dies under `torchrun --max-restarts`, as below",
        "at once",
        "torchrun restarts all workers, and they resume",
        "training continues",
        "elastic/test_restart.py::test_torchrun_restarts_what_resumes",
    ),
    Row(
        "a disk is full: `offbeat.save`",
        "at once",
        "`CheckpointError: rank 0 cannot save, so no worker does: … No space left on device`",
        "the previous checkpoint; training continues",
        "test_full_disk.py::test_a_checkpoint_that_does_not_fit_is_refused_by_all",
    ),
    Row(
        "the same: the `log` of `attach`",
        "at once; a warning names the file",
        "nothing",
        "training continues",
        "test_full_disk.py::test_a_log_that_does_not_fit_ends_and_training_continues",
    ),
    Row(
        "the same: `offbeat compare --output`",
        "when a run has ended",
        "`error: runs/x/results.jsonl: No space left on device`, exit status 2",
        "results of earlier runs",
        "cli/test_cli_full_disk.py::test_results_that_do_not_fit_are_one_line",
    ),
    Row(
        "the same: a checkpoint of `offbeat train`",
        "when it is saved",
        "`error: worker 0 failed: rank 0 cannot save …`; after a signal a line says so",
        "the checkpoint before",
        "cli/test_cli_full_disk.py::test_an_interrupted_run_reports_why_nothing_was_saved",
    ),
    Row(
        "a worker of `offbeat train` or `compare` is killed",
        "at once",
        "`error: worker 1 was ended by SIGKILL`, exit status 1",
        "results of runs that have ended",
        "cli/test_cli_runs.py::test_a_killed_worker_is_named",
    ),
    Row(
        "Ctrl-C, or SIGTERM to `offbeat train` or `compare`",
        "at once",
        "all are ended; exit status 130 or 143",
        "results of runs that have ended; no worker, namespace or temporary folder",
        "cli/test_cli_runs.py::test_a_signal_ends_every_worker",
    ),
    Row(
        "the same to `offbeat train --checkpoints`",
        "at the end of a step; after 10 s all are ended",
        "all save at one step and leave; exit status 130 or 143",
        "that checkpoint; after these 10 s the last one",
        "cli/test_cli_runs.py::test_a_signal_lets_all_workers_save",
    ),
    Row(
        "the same while links are being shaped",
        "at once",
        "",
        "no namespace",
        "cli/test_cli_runs.py::test_a_signal_while_links_are_shaped_leaves_no_namespace",
    ),
    Row(
        "a second one while that is being cleaned up",
        "at once",
        "all are ended, on Linux",
        "perhaps namespaces, until the next run, and a temporary folder",
        "cli/test_cli_runs.py::test_a_second_signal_ends_at_once",
    ),
    Row(
        "SIGKILL to `offbeat train` or `compare`",
        "at once, on Linux",
        "all are ended",
        "namespaces, until the next run, and a temporary folder",
        "cli/test_cli_runs.py::test_workers_do_not_outlive_a_killed_parent",
    ),
]


def table() -> str:
    """Return the rows as they appear on the page."""
    lines = ["| fault | noticed | the other workers see | what remains |", "|---|---|---|---|"]
    lines += [f"| {r.what} | {r.noticed} | {r.others} | {r.left} |" for r in ROWS]
    return "\n".join(lines) + "\n"


def test_the_page_has_the_table_of_this_list() -> None:
    """It has these rows and no others."""
    page = (DOCS / "failures.md").read_text(encoding="utf-8")
    assert table() in page
    first = re.search(r"\n\n\| fault \| noticed.*?\n\n", page, re.DOTALL)
    assert first is not None
    assert first[0].strip() == table().strip()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.test.rpartition("::")[2])
def test_every_row_names_an_existing_test(row: Row) -> None:
    path, _, name = row.test.partition("::")
    assert f"\ndef {name}(" in (TESTS / path).read_text(encoding="utf-8")
