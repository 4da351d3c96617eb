"""One page of what runs did: records, traces, evaluations as charts, in a file that loads nothing. No torch."""
