"""What would stop a job is found before it starts, on every host at once: ``probe`` runs on the hosts, ``session`` and
``survey`` ask it, ``compare`` and ``limits`` judge the answers, ``report`` prints them, ``run`` joins these for
``capt doctor`` and for a launch."""
