"""What a plan will cost before it runs: prices of tasks, a simulation of the schedule, lower bounds. No torch."""
