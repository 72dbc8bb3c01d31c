"""Tests of offbeat.transport."""
