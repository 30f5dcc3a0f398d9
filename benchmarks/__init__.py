"""One command per question; each prints ratios measured in one run."""
