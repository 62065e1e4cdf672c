"""EM Distillation (Xie et al. 2024): train and run one-step generators, repair samples by MCMC."""
