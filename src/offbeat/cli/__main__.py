"""``python -m offbeat.cli``, which is also what torchrun starts."""

from offbeat.cli import main

if __name__ == "__main__":
    main()
