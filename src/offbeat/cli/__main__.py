"""``python -m offbeat.cli`` runs the command line, for example under torchrun."""

from offbeat.cli import main

if __name__ == "__main__":
    main()
