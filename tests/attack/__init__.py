"""Somebody on the network between all processes of a job."""
