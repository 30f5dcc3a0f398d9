"""What an exported folder runs on a machine without this project: `pretrain.export.code` copies these modules and the
network's beside the weights. They import nothing else of the project."""
