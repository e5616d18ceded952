"""Measurements: load on a server, grids on an engine, figures of single parts. Nothing here is needed to serve."""
