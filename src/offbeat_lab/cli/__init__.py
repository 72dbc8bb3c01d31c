"""Commands of the laboratory, which ``offbeat`` offers if the extra ``lab`` is installed."""
