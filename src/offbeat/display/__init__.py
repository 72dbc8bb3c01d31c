"""How results are displayed: tables and plots."""
