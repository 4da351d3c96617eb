"""Files of requests: read in windows, answered in any order, written so that a killed job goes on where it was."""
