"""The papers' figures and tables that can be tried at small scale, one module for each."""
