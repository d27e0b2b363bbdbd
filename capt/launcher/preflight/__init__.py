"""Find what would stop a job before it starts, on every host in parallel: ``probe`` runs on the hosts, ``survey`` asks
it, ``limits`` judges the answers, ``report`` prints them, and ``run`` joins these for ``capt doctor`` and a launch."""
