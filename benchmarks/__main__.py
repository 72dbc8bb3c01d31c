"""Every benchmark that has a target, one after the other: ``python -m benchmarks [NAME …]``.

``python -m benchmarks race …`` has options of its own; ``evidence`` makes pages of what was raced.
"""

import argparse
import importlib
import signal
import sys

from benchmarks.harness import HEADER, markdown, report

NAMES = (
    "trigger",
    "attach",
    "average",
    "codec",
    "compression",
    "bsp",
    "memory",
    "idle",
    "beside",
    "discrepancy",
    "overhead",
    "validation",
    "papers",
    "server",
    "strategies",
    "settings",
    "noniid",
    "wire",
    "elastic",
)

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # links that were shaped are taken away
    if sys.argv[1:2] == ["race"]:
        from benchmarks import race

        race.main(sys.argv[2:])
        raise SystemExit
    if sys.argv[1:2] == ["evidence"]:
        from benchmarks import evidence

        evidence.main()
        raise SystemExit
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", default=NAMES, help=f"of {', '.join(NAMES)}")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, nothing saved")
    parser.add_argument("--table", action="store_true", help="only print the saved figures")
    options = parser.parse_args()
    unknown = set(options.names) - set(NAMES)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    if options.table:
        print(markdown(options.names))
        raise SystemExit
    print(HEADER)
    for name in options.names:
        module = importlib.import_module(f"benchmarks.{name}")
        report(module.results(quick=options.quick), save=not options.quick)
