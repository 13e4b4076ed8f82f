//! The tokenizer of a GGUF file as a `tokenizer.json`.
//!
//! Two kinds: byte-level BPE (`gpt2`), whose merges are in the file, and SentencePiece BPE (`llama`), whose merges follow from the
//! scores of its tokens.

use std::collections::HashMap;

use serde_json::{Map, Value as Json, json};

use super::{Gguf, GgufError, wrong_key};

/// GGUF's types of tokens.
const UNKNOWN: f64 = 2.0;
const CONTROL: f64 = 3.0;
const USER_DEFINED: f64 = 4.0;

/// Pre-tokenizers that are known, by their names in files.
const PRE_TOKENIZERS: &str = "gpt-2, smollm, llama-bpe, qwen2";
/// Longest token of a SentencePiece vocabulary: all cuts of one are tried.
const MAX_PIECE_BYTES: usize = 1024;

/// How Llama 3 cuts a text before it merges.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// How Qwen 2 and 3 do: digits one by one.
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

impl Gguf<'_> {
    pub(in crate::model) fn tokenizer(&self) -> Result<String, GgufError> {
        let key = "tokenizer.ggml.model";
        match self.text(key)? {
            Some("gpt2") => self.byte_level(),
            Some("llama") => self.sentence_piece(),
            _ => Err(wrong_key(key, self.metadata.get(key), "gpt2 or llama")),
        }
    }

    fn byte_level(&self) -> Result<String, GgufError> {
        let key = "tokenizer.ggml.pre";
        let name = self.text(key)?;
        let byte_level = |use_regex: bool| json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex });
        let split = |pattern: &str| json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false });
        let cut = match name {
            Some("gpt-2") => vec![byte_level(true)],
            Some("smollm") => vec![json!({ "type": "Digits", "individual_digits": true }), byte_level(true)],
            Some("llama-bpe" | "llama3" | "llama-v3") => vec![split(LLAMA3), byte_level(false)],
            Some("qwen2" | "deepseek-r1-qwen") => vec![split(QWEN2), byte_level(false)],
            _ => return Err(wrong_key(key, self.metadata.get(key), format!("one of {PRE_TOKENIZERS}"))),
        };
        let (is_llama3, is_qwen) =
            (cut[0]["pattern"]["Regex"] == LLAMA3, cut[0]["pattern"]["Regex"] == QWEN2);
        let model = json!({
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": is_llama3,
            "vocab": self.vocabulary()?, "merges": self.texts("tokenizer.ggml.merges")?,
        });
        let tokenizer = json!({
            "version": "1.0", "truncation": null, "padding": null,
            "added_tokens": self.added_tokens()?,
            "normalizer": if is_qwen { json!({ "type": "NFC" }) } else { Json::Null },
            "pre_tokenizer": { "type": "Sequence", "pretokenizers": cut },
            "post_processor": self.frame(is_llama3)?,
            "decoder": byte_level(true),
            "model": model,
        });
        Ok(tokenizer.to_string())
    }

    fn sentence_piece(&self) -> Result<String, GgufError> {
        let tokens = self.texts("tokenizer.ggml.tokens")?;
        let unknown = self.special("unknown")?.map(|id| tokens[id as usize]);
        let prefix = self.switch("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
        let mut normalizers =
            vec![json!({ "type": "Replace", "pattern": { "String": " " }, "content": "▁" })];
        let mut decoders = vec![
            json!({ "type": "Replace", "pattern": { "String": "▁" }, "content": " " }),
            json!({ "type": "ByteFallback" }),
            json!({ "type": "Fuse" }),
        ];
        if prefix {
            normalizers.insert(0, json!({ "type": "Prepend", "prepend": "▁" }));
            decoders.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
        }
        let model = json!({
            "type": "BPE", "dropout": null, "unk_token": unknown, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": self.vocabulary()?, "merges": self.merges_by_score(tokens)?,
        });
        let tokenizer = json!({
            "version": "1.0", "truncation": null, "padding": null,
            "added_tokens": self.added_tokens()?,
            "normalizer": { "type": "Sequence", "normalizers": normalizers },
            "pre_tokenizer": null,
            "post_processor": self.frame(true)?,
            "decoder": { "type": "Sequence", "decoders": decoders },
            "model": model,
        });
        Ok(tokenizer.to_string())
    }

    fn vocabulary(&self) -> Result<Map<String, Json>, GgufError> {
        let tokens = self.texts("tokenizer.ggml.tokens")?;
        let vocabulary: Map<String, Json> =
            tokens.iter().enumerate().map(|(id, token)| ((*token).to_owned(), id.into())).collect();
        if vocabulary.len() != tokens.len() {
            let found = format!("{} tokens, {} of them different", tokens.len(), vocabulary.len());
            let wanted = "all different".to_owned();
            return Err(GgufError::Metadata { key: "tokenizer.ggml.tokens".into(), found, wanted });
        }
        Ok(vocabulary)
    }

    /// Tokens that are found in a text before anything else.
    fn added_tokens(&self) -> Result<Vec<Json>, GgufError> {
        let tokens = self.texts("tokenizer.ggml.tokens")?;
        let Some(kinds) = self.numbers("tokenizer.ggml.token_type")? else { return Ok(Vec::new()) };
        let added = tokens.iter().zip(kinds.iter()).enumerate();
        let added = added.filter(|(_, (token, kind))| {
            [UNKNOWN, CONTROL, USER_DEFINED].contains(kind) && !token.is_empty()
        });
        let entry = |(id, (token, kind)): (usize, (&&str, f64))| {
            json!({ "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": kind != USER_DEFINED })
        };
        Ok(added.map(entry).collect())
    }

    /// What is put around a bare prompt.
    fn frame(&self, bos_by_default: bool) -> Result<Json, GgufError> {
        let tokens = self.texts("tokenizer.ggml.tokens")?;
        let wanted = |name: &str, default: bool| {
            self.switch(&format!("tokenizer.ggml.add_{name}_token")).map(|add| add.unwrap_or(default))
        };
        let token = |name: &str, add: bool| if add { self.special(name) } else { Ok(None) };
        let bos = token("bos", wanted("bos", bos_by_default)?)?;
        let eos = token("eos", wanted("eos", false)?)?;
        if bos.is_none() && eos.is_none() {
            return Ok(Json::Null);
        }
        let part = |id: u64| json!({ "SpecialToken": { "id": tokens[id as usize], "type_id": 0 } });
        let sequence = |name: &str| json!({ "Sequence": { "id": name, "type_id": 0 } });
        let around = |inner: Vec<Json>| -> Vec<Json> {
            bos.map(part).into_iter().chain(inner).chain(eos.map(part)).collect()
        };
        let special: Map<String, Json> = bos
            .into_iter()
            .chain(eos)
            .map(|id| {
                let token = tokens[id as usize];
                (token.to_owned(), json!({ "id": token, "ids": [id], "tokens": [token] }))
            })
            .collect();
        Ok(json!({
            "type": "TemplateProcessing",
            "single": around(vec![sequence("A")]),
            "pair": around(vec![sequence("A"), sequence("B")]),
            "special_tokens": special,
        }))
    }

    /// SentencePiece merges, again and again, the two neighbours that make the token with the highest score. As a list of merges
    /// in order: every cut of every token into two, those of the highest score first.
    fn merges_by_score(&self, tokens: &[&str]) -> Result<Vec<(String, String)>, GgufError> {
        let key = "tokenizer.ggml.scores";
        let scores = self.numbers(key)?.filter(|scores| scores.len() == tokens.len());
        let scores =
            scores.ok_or_else(|| wrong_key(key, self.metadata.get(key), "a number for each token"))?;
        if let Some(token) = tokens.iter().find(|token| token.len() > MAX_PIECE_BYTES) {
            let found = format!("a token of {} bytes", token.len());
            let wanted = format!("tokens of at most {MAX_PIECE_BYTES} bytes");
            return Err(GgufError::Metadata { key: "tokenizer.ggml.tokens".into(), found, wanted });
        }
        let ids: HashMap<&str, usize> = tokens.iter().enumerate().map(|(id, token)| (*token, id)).collect();
        let mut merges = Vec::new();
        for (token, score) in tokens.iter().zip(scores.iter()) {
            let cuts = token.char_indices().skip(1).map(|(at, _)| token.split_at(at));
            let known = cuts.filter_map(|(left, right)| Some((score, *ids.get(left)?, *ids.get(right)?)));
            merges.extend(known);
        }
        merges.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
        Ok(merges
            .into_iter()
            .map(|(_, left, right)| (tokens[left].to_owned(), tokens[right].to_owned()))
            .collect())
    }
}
