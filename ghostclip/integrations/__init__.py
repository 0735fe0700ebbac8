"""One file for each outside system, imported only where that system is in use."""
