"""What another policy would have done with the requests of a log of decisions."""
