"""Starts: of a checkout, of a cluster, of many services."""
