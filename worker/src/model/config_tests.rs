//! What `config.json` may say, and what is said about the rest.

use std::path::Path;

use serde_json::{Value, json};

use super::*;
use crate::model::ModelSource;

fn llama() -> Value {
    json!({
        "model_type": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "eos_token_id": 7
    })
}

fn read(config: &Value) -> Result<ModelConfig, ModelError> {
    serde_json::from_value::<Raw>(config.clone()).unwrap().into_config()
}

fn with(key: &str, value: Value) -> Value {
    let mut config = llama();
    config[key] = value;
    config
}

#[test]
fn defaults_are_hugging_faces() {
    let config = read(&llama()).unwrap();
    assert_eq!(config.head_dim, 16);
    assert_eq!(config.rope, Rope { theta: 10_000.0, scaling: RopeScaling::None });
    assert!(!config.tied_embeddings && !config.qkv_bias && !config.mlp_bias && !config.qk_norm());
    assert_eq!(config.eos_tokens, [7]);
    let many = read(&with("num_key_value_heads", Value::Null)).unwrap();
    assert_eq!(many.kv_heads, 4);
}

#[test]
fn qwen2_has_its_bias_without_a_key() {
    let config = read(&with("model_type", json!("qwen2"))).unwrap();
    assert!(config.qkv_bias && !config.output_bias);
}

#[test]
fn what_is_not_implemented_is_refused_by_name() {
    let refused = [
        ("model_type", json!("mixtral"), "llama, qwen2, qwen3"),
        ("hidden_act", json!("gelu"), "silu"),
        ("quantization_config", json!({ "quant_method": "awq" }), "awq"),
        ("use_sliding_window", json!(true), "full attention"),
        ("layer_types", json!(["full_attention", "sliding_attention"]), "sliding_attention"),
        ("rope_scaling", json!({ "type": "yarn", "factor": 4.0 }), "default, linear, llama3"),
        ("rope_scaling", json!({ "type": "linear" }), "factor"),
        ("rope_parameters", json!({ "rope_type": "dynamic", "rope_theta": 1e4 }), "dynamic"),
        ("partial_rotary_factor", json!(0.5), "0.5"),
        ("num_key_value_heads", json!(3), "divisor"),
        ("head_dim", json!(15), "even"),
        ("hidden_size", json!(0), "at least 1"),
    ];
    for (key, value, reason) in refused {
        let error = read(&with(key, value)).unwrap_err().to_string();
        assert!(error.contains(reason), "{key}: {error} should say {reason}");
    }
}

#[test]
fn sliding_window_that_no_layer_uses_is_no_obstacle() {
    let mut config = with("use_sliding_window", json!(true));
    config["max_window_layers"] = json!(2);
    assert!(read(&config).is_ok());
}

#[test]
fn transformers_5_spells_the_same_configuration() {
    for name in ["tiny-llama", "tiny-qwen2", "tiny-qwen3"] {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
        let read_file = |file: &str| {
            let text = std::fs::read_to_string(directory.join(file)).unwrap();
            read(&serde_json::from_str(&text).unwrap()).unwrap()
        };
        assert_eq!(read_file("config.json"), read_file("config.v5.json"), "{name}");
    }
}

#[test]
fn generation_config_has_the_last_word_on_end_tokens() {
    let mut files = ModelFiles::open(&ModelSource::Builtin).unwrap();
    files.generation_config = Some(r#"{"eos_token_id": [5, 6]}"#.to_owned());
    assert_eq!(ModelConfig::from_files(&files).unwrap().eos_tokens, [5, 6]);
    files.generation_config = None;
    assert_eq!(ModelConfig::from_files(&files).unwrap().eos_tokens, [2]);
}

#[test]
fn json_that_is_none_names_its_file() {
    let mut files = ModelFiles::open(&ModelSource::Builtin).unwrap();
    files.config = "{".to_owned();
    assert!(ModelConfig::from_files(&files).unwrap_err().to_string().starts_with("config.json"));
}
