"""Find what would stop a job before it starts, on every host in parallel: ``probe`` runs on the hosts, ``session`` and
``survey`` ask it, ``compare`` and ``limits`` judge the answers, ``report`` prints them, ``run`` joins these for
``capt doctor`` and for a launch."""
