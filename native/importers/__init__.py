"""Importers turn other formats into `.tinyloop` artifacts; none is needed to serve. Start at `convert`.

convert -> gguf (byte_bpe)
        -> tinyloop (another artifact of the same model)
        -> huggingface -> shards (safetensors), plan, the families (llama, ouro, huginn, nanbeige), text, beta
"""
