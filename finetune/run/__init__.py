"""What every recipe shares: ``entry`` (exit codes), ``screen`` (what a person sees), ``data_checks``."""
