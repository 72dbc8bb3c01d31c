"""The failures of docs/failures.md: each row of its table is proven by a test."""

import re
from pathlib import Path

from pages import DOCS

TESTS = Path(__file__).parent
ROWS = {
    "a worker is killed (out of memory, `kill -9`)": (
        "test_a_dead_worker_is_named_by_every_survivor"
    ),
    "an exception leaves `with attach(...)` on one worker, or it calls `detach()`": (
        "test_all_workers_notice_that_one_gives_up"
    ),
    "Ctrl-C on one worker": "test_ctrl_c_interrupts_every_wait",
    "a parameter server is killed": "test_a_dead_worker_is_named_by_every_survivor",
    "a client of a parameter server is killed, while the server's worker computes": (
        "test_the_death_of_a_client_of_a_busy_server_is_noticed"
    ),
    "a worker is stopped (SIGSTOP), stuck, or cut off silently": (
        "test_a_silent_worker_is_named_after_the_time_out"
    ),
    "a worker is slow, by less than `timeout_seconds`": (
        "test_done_is_false_until_all_workers_have_started"
    ),
    "a worker does not call `attach`": "test_a_worker_that_does_not_open_its_connections_is_named",
    "a worker is killed, in elastic training": "test_training_survives_a_death_and_a_join",
    "a machine loses power or its network, in elastic training": (
        "test_a_silent_machine_is_noticed_within_the_time_limit"
    ),
    "connections to a worker open and deliver nothing, in elastic training": (
        "test_every_worker_continues_or_raises"
    ),
    "a worker that joins cannot receive the model within `timeout_seconds`": (
        "test_a_newcomer_that_cannot_receive_the_model_in_time_leaves"
    ),
    "a worker is stopped or cut off for too long, in elastic training": (
        "test_a_stopped_worker_is_left_behind"
    ),
    "more are lost than `min_workers` allows": "test_too_few_workers_raise_one_error",
    "NaN or infinity in one worker's model or gradients": (
        "test_by_default_all_workers_raise_before_the_mean"
    ),
    'the same with `non_finite="warn"`': "test_a_warning_is_logged_once",
    "a worker is killed while checkpoints are written": (
        "test_a_killed_writer_leaves_this_checkpoint_or_the_one_before"
    ),
    "a worker dies under `torchrun --max-restarts`, as below": (
        "test_torchrun_restarts_what_resumes"
    ),
    "a disk is full: `offbeat.save`": "test_a_checkpoint_that_does_not_fit_is_refused_by_all",
    "the same: the `log` of `attach`": "test_a_log_that_does_not_fit_ends_and_training_continues",
    "the same: `offbeat compare --output`": "test_results_that_do_not_fit_are_one_line",
    "a worker of `offbeat compare` is killed": "test_another_death_fails",
    "Ctrl-C, or SIGTERM to `offbeat compare`": "test_a_signal_ends_every_worker",
    "the same while links are being shaped": (
        "test_a_signal_while_links_are_shaped_leaves_no_namespace"
    ),
    "a second one while that is being cleaned up": "test_a_second_signal_ends_at_once",
    "SIGKILL to `offbeat compare`": "test_workers_do_not_outlive_a_killed_parent",
}
"""The fault of each row of the table, and the test that proves the row."""


def test_every_row_of_the_table_has_a_test() -> None:
    """There are no other rows."""
    page = (DOCS / "failures.md").read_text(encoding="utf-8")
    table = re.search(r"\n\n\| fault \| noticed.*?\n\|---.*?\n(.*?)\n\n", page, re.DOTALL)
    assert table is not None
    assert [row.split(" | ")[0].removeprefix("| ") for row in table[1].splitlines()] == [*ROWS]


def test_every_row_names_an_existing_test() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))
    assert [test for test in ROWS.values() if text.count(f"\ndef {test}(") != 1] == []
