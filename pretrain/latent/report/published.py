"""The tables of the paper (Contrastive Latent Variable Models for Neural Text Generation, UAI 2022), as printed.

Columns of :data:`PUBLISHED`: -ELBO, PPL, KL, MI, AU. For implicit rows (iVAE, clVAE) all but AU come from dual
estimates, which bound nothing; for Gaussian rows of Yahoo and Yelp -ELBO is an importance-weighted likelihood.
"""

from __future__ import annotations

PUBLISHED: dict[str, dict[str, tuple[float, float, float, float, int]]] = {
    "ptb": {  # Tables 1, 3 (over h) and 7 (swap)
        "VAE": (102.6, 108.26, 1.08, 0.8, 2),
        "beta_0.5 VAE": (104.5, 117.92, 7.50, 3.1, 5),
        "SaVAE": (102.6, 107.71, 1.23, 0.7, 2),
        "CycVAE": (103.1, 110.50, 3.48, 1.8, 5),
        "iVAE": (87.6, 54.46, 6.32, 3.5, 32),
        "iVAE_MI": (87.2, 53.44, 12.51, 12.2, 32),
        "clVAE": (82.7, 43.51, 8.37, 5.55, 32),
        "clVAE_MI": (82.7, 43.49, 13.95, 13.69, 32),
        "clVAE+": (79.8, 38.04, 7.01, 4.72, 32),
        "clVAE+_MI": (77.7, 34.61, 9.94, 9.58, 32),
        "clVAE over h": (83.0, 44.10, 7.51, 4.92, 32),
        "clVAE_MI over h": (86.7, 52.13, 13.35, 13.09, 32),
        "clVAE+_MI swap": (79.1, 36.96, 9.21, 8.95, 32),
    },
    "yahoo": {  # Table 2
        "VAE": (328.6, 61.21, 0.0, 0.0, 0),
        "beta_0.4 VAE": (328.7, 61.29, 6.3, 2.8, 8),
        "SaVAE": (327.2, 60.15, 5.2, 2.7, 10),
        "LagVAE": (326.7, 59.77, 5.7, 2.9, 15),
        "iVAE": (309.5, 48.22, 8.0, 4.4, 32),
        "iVAE_MI": (309.1, 47.93, 11.4, 10.7, 32),
        "clVAE+_MI": (303.3, 44.61, 8.6, 7.7, 32),
    },
    "yelp": {  # Table 2
        "VAE": (357.9, 40.56, 0.0, 0.0, 0),
        "beta_0.4 VAE": (358.2, 40.69, 4.2, 2.0, 4),
        "SaVAE": (355.9, 39.73, 2.8, 1.7, 8),
        "LagVAE": (355.9, 39.73, 3.8, 2.4, 11),
        "iVAE": (348.2, 36.70, 7.6, 4.6, 32),
        "iVAE_MI": (348.7, 36.88, 11.6, 11.0, 32),
        "clVAE+_MI": (343.6, 34.97, 8.8, 8.2, 32),
    },
}

SENTENCES: dict[str, tuple[int, ...]] = {"ptb": (3_761, 3_370), "yahoo": (10_000,), "yelp": (10_000,)}
"""The sentences of the test and of the validation text. A text of another size is not the paper's."""

GENERATED: dict[str, tuple[int, int]] = {  # Table 4, PTB: forward and reverse perplexity
    "VAE": (18_494, 10_149),
    "CycVAE": (3_390, 5_587),
    "AE": (672, 2_589),
    "beta_0 VAE": (625, 1_897),
    "beta_0.5 VAE": (939, 4_078),
    "SaVAE": (341, 10_651),
    "iVAE": (116, 1_520),
    "iVAE_MI": (134, 1_137),
    "clVAE+_MI": (120, 1_047),
}
