"""`engine-bench paper`: the evaluation of the PagedAttention paper (Kwon et al., SOSP 2023), to be run again."""
