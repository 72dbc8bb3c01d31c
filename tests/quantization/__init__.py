"""Tests of offbeat.quantization."""
