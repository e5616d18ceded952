"""Quantisation of whole checkpoints: `leyden quantize`.

recipe       which matrix gets which format
calibrate    what the matrices are multiplied with, layer by layer, on texts of the user's
compensate   rounding that makes up for its own errors (GPTQ)
convert      checkpoint -> checkpoint, shard by shard
report       how much was lost, as JSON, as a figure and as a model card
command      the command line
"""
