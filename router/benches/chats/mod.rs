//! Chat requests as clients send them.

/// Shared beginnings, as of eight applications.
const SYSTEM_PROMPTS: usize = 8;
/// How much of the text is the shared beginning, in percent.
const SHARED_PERCENT: usize = 75;

const PROSE: &str = "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be \
    in want of a wife.\nHowever little known the feelings or views of such a man may be on his first entering a \
    neighbourhood, this truth is so well fixed in the minds of the surrounding families, that he is considered as the \
    rightful property of some one or other of their daughters.\n\"My dear Mr. Bennet,\" said his lady to him one day, \
    \"have you heard that Netherfield Park is let at last?\"\n";

/// Text of that length, from somewhere in the prose.
pub(crate) fn prose(from: usize, bytes: usize) -> String {
    PROSE.chars().cycle().skip(from % PROSE.len()).take(bytes).collect()
}

/// Chat bodies of about `bytes`, one for each of the shared beginnings.
pub(crate) fn chats(bytes: usize) -> Vec<Vec<u8>> {
    let of_system = |n: usize| {
        let shared = format!("You are assistant number {n}. {}", prose(n * 17, bytes * SHARED_PERCENT / 100));
        let own = format!("{n} {}", prose(n * 31, bytes * (100 - SHARED_PERCENT) / 100));
        let body = serde_json::json!({
            "model": "meta-llama/Llama-3.1-8B-Instruct", "stream": true, "max_tokens": 128, "temperature": 0.7,
            "stream_options": {"include_usage": true},
            "messages": [{"role": "system", "content": shared}, {"role": "user", "content": own}],
        });
        body.to_string().into_bytes()
    };
    (0..SYSTEM_PROMPTS).map(of_system).collect()
}
