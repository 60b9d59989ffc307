"""Where shards run: in this process (:mod:`local`) or as Ray actors on a cluster (:mod:`ray`)."""
