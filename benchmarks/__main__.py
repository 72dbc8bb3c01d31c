"""All benchmarks that have figures, one after the other: ``python -m benchmarks [NAME …]``.

``python -m benchmarks evidence`` makes the tables of the page that quotes the comparisons of
``benchmarks.race``.
"""

import argparse
import importlib
import signal
import sys

from benchmarks.harness import HEADER, report

NAMES = {
    "trigger": "costs.trigger",
    "codec": "costs.codec",
    "memory": "costs.memory",
    "large": "costs.large",
    "gpu": "costs.gpu",
    "validation": "costs.validation",
    "start": "launched.start",
}
"""Name of a benchmark → its module, which has a function ``results``."""


def main(argv: list[str]) -> None:
    """Run ``python -m benchmarks`` with these arguments."""
    if argv == ["evidence"]:
        importlib.import_module("benchmarks.race.evidence").main()
        return
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    default = [name for name in NAMES if name != "gpu"]
    parser.add_argument("names", nargs="*", default=default, help=f"of {', '.join(NAMES)}")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, nothing saved")
    options = parser.parse_args(argv)
    unknown = set(options.names) - set(NAMES)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    print(HEADER)
    for name in options.names:
        module = importlib.import_module(f"benchmarks.{NAMES[name]}")
        report(module.results(quick=options.quick), save=not options.quick)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that shaped links are removed
    main(sys.argv[1:])
