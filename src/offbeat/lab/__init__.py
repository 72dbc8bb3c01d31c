"""EVIDENCE: recipes, real workers on shaped links, comparisons and reports."""
