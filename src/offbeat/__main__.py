"""``python -m offbeat`` runs the command line."""

from offbeat.cli import main

if __name__ == "__main__":
    main()
