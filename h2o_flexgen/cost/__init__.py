"""The cost of a plan before it runs: prices of tasks, a simulation of the schedule, lower bounds. No torch."""
