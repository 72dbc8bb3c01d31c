"""Tests of offbeat.fabric; a package, so that a file here may be named like one above."""
