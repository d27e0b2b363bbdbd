r"""The objectives of the paper's tables (Contrastive Latent Variable Models for Neural Text Generation, UAI 2022).

Each row of the tables is one function of :mod:`capt.pretrain.latent.objectives.losses`, which the encoder minimises
and whose reconstruction term the decoder minimises. An implicit posterior also has critics f and g, whose losses are in
:mod:`capt.pretrain.latent.objectives.losses`. Equation numbers are the paper's.

============ ================================================ ============= ================== ======================
row          the encoder minimises                            equation      function           presets
============ ================================================ ============= ================== ======================
LSTM-LM      rec (z = 0)                                      .             reconstruction     lstm_lm
AE           rec                                              .             reconstruction     ae
VAE          rec + beta KL                                    1, 5          vae                vae
beta VAE     the same, beta up to 0.5                         1, 5          vae                beta_vae
CycVAE       the same, beta in cycles                         1, 5          vae                cyc_vae
LagVAE       the same, encoder trained ahead of the decoder   1, 5          vae                lag_vae
SaVAE        the same at posteriors refined by SVI            1, 5          sa_vae             sa_vae
iVAE         rec + beta f                                     4, 6          ivae               ivae
iVAE_MI      rec + beta g                                     7             ivae_mi            ivae_mi
clVAE        iVAE + L_CL                                      11            clvae              clvae
clVAE_MI     iVAE_MI + L_CL                                   12            clvae_mi           clvae_mi
clVAE+       rec + beta f + L_CL, circle critics              15, 18, 19    clvae_plus         clvae_plus
clVAE+_MI    rec + beta (g + L_SQ) + L_CL, circle critics     16, 18, 19    clvae_plus_mi      clvae_plus_mi
============ ================================================ ============= ================== ======================

rec is -log p(x | z), L_CL is InfoNCE (Eq. 10), and L_SQ is Eq. 17. The critics of iVAE, iVAE_MI, clVAE and clVAE_MI
minimise the negative dual (Eq. 3), those of clVAE+ and clVAE+_MI the circle loss and L_SQ (Eq. 18). Presets that end in
``_paper`` have the function of the preset that they are named after; ``yahoo/clvae_plus_mi_code`` and
``yelp/clvae_plus_mi_code``, whose critics minimise the dual, have ``clvae_mi``.
"""
