"""Measures keiro beside the plain drivers and its peers, in one run of one machine."""
