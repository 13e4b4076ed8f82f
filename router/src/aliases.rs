//! Names that clients may ask for in place of a model's. One may stand for several models, that share its requests: a new version gets a few of them at
//! first, and another model takes over where the one that is meant cannot be reached.
//!
//! Which of several a request is for follows from what conversation it belongs to, not from chance: later turns go where the earlier ones were, whose KV is
//! there, and every router of a fleet says the same. Asked by [`parse`](crate::stages::parse), before the prompt's hashes are made, since what is cached is
//! cached for a model; from there on a request is for the model that is meant, and its body says so.

use std::collections::HashMap;

use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::config::ModelAlias;

/// All such names.
#[derive(Debug, Default)]
pub struct Aliases(HashMap<String, ModelAlias>);

impl Aliases {
    /// Those of a configuration.
    #[must_use]
    pub fn new(list: &[ModelAlias]) -> Self {
        Self(list.iter().map(|alias| (alias.name.clone(), alias.clone())).collect())
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The model that a request for `name` is for, which belongs to a `conversation`; `None` if it stands for nothing. Of several models one that
    /// `is_served`, if any is.
    #[must_use]
    pub fn meant(
        &self,
        name: &str,
        conversation: impl FnOnce() -> u64,
        is_served: impl Fn(&str) -> bool,
    ) -> Option<&str> {
        let models = match &self.0.get(name)?.models[..] {
            [(model, _)] => return Some(model),
            models => models,
        };
        let conversation = conversation();
        let mut in_turn: Vec<(f64, &str)> = models
            .iter()
            .map(|(model, parts)| (score(conversation, model, *parts), model.as_str()))
            .collect();
        // Stable: those without a part keep their order.
        in_turn.sort_by(|(one, _), (other, _)| other.total_cmp(one));
        let served = in_turn.iter().find(|(_, model)| is_served(model));
        served.or(in_turn.first()).map(|(_, model)| *model)
    }

    /// What a list of models has of these names: each as the first listed model that it stands for.
    #[must_use]
    pub fn entries(&self, listed: &[Value]) -> Vec<Value> {
        let mut aliases: Vec<&ModelAlias> = self.0.values().collect();
        aliases.sort_by_key(|alias| &alias.name);
        let is_listed = |name: &str| listed.iter().find(|entry| entry["id"] == name);
        let entry = |alias: &&ModelAlias| {
            let mut entry = alias.models.iter().find_map(|(model, _)| is_listed(model))?.clone();
            (entry["root"], entry["id"]) = (entry["id"].clone(), alias.name.as_str().into());
            Some(entry)
        };
        aliases.iter().filter(|alias| is_listed(&alias.name).is_none()).filter_map(entry).collect()
    }
}

/// Rendezvous hashing with weights: the highest of a conversation's scores says which model it is for. Each is so with a probability of its share of all
/// parts, and when one gets more parts, conversations go to it and to no other. 0 without a part.
fn score(conversation: u64, model: &str, parts: u32) -> f64 {
    // From 0 to 1, without the ends.
    let drawn = (xxh3_64_with_seed(model.as_bytes(), conversation) >> 12) as f64 + 0.5;
    let share = drawn / (1_u64 << 52) as f64;
    f64::from(parts) / -share.ln()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn aliases(models: &[(&str, u32)]) -> Aliases {
        let models = models.iter().map(|(model, parts)| ((*model).to_owned(), *parts)).collect();
        Aliases::new(&[ModelAlias { name: "chat".to_owned(), models }])
    }

    fn meant(aliases: &Aliases, conversation: u64) -> String {
        aliases.meant("chat", || conversation, |_| true).unwrap().to_owned()
    }

    #[test]
    fn models_share_conversations_by_their_parts() {
        let aliases = aliases(&[("v1", 90), ("v2", 10)]);
        let second = (0..10_000).filter(|one| meant(&aliases, *one) == "v2").count();
        assert!((900..1_100).contains(&second), "{second}");
        assert!((0..100).all(|one| meant(&aliases, one) == meant(&aliases, one)));
        assert_eq!(aliases.meant("v1", || unreachable!(), |_| true), None, "a model stands for itself");
    }

    #[test]
    fn when_a_model_gets_more_nobody_leaves_it() {
        let (few, many) = (aliases(&[("v1", 95), ("v2", 5)]), aliases(&[("v1", 50), ("v2", 50)]));
        let conversations: Vec<u64> = (0..5_000).collect();
        let mut at_first = conversations.iter().filter(|one| meant(&few, **one) == "v2").peekable();
        assert!(at_first.peek().is_some() && at_first.all(|one| meant(&many, *one) == "v2"));
    }

    #[test]
    fn where_a_model_is_not_served_another_one_is_meant() {
        let aliases = aliases(&[("main", 1), ("small", 0), ("spare", 0)]);
        let among = |served: &[&str]| aliases.meant("chat", || 7, |model| served.contains(&model)).unwrap();
        assert_eq!(among(&["main", "small", "spare"]), "main");
        assert_eq!([among(&["spare", "small"]), among(&["spare"])], ["small", "spare"]);
        assert_eq!(among(&[]), "main", "whose absence is what is told");
    }

    #[test]
    fn lists_of_models_have_names_that_stand_for_something_listed() {
        let aliases = aliases(&[("v1", 1), ("v2", 0)]);
        let (first, second) =
            (json!({"id": "v1", "root": "/models/v1", "n": 1}), json!({"id": "v2", "n": 2}));
        let entries = |listed: &[&Value]| {
            aliases.entries(&listed.iter().map(|entry| (*entry).clone()).collect::<Vec<_>>())
        };
        assert_eq!(entries(&[&first, &second]), [json!({"id": "chat", "root": "v1", "n": 1})]);
        assert_eq!(entries(&[&second]), [json!({"id": "chat", "root": "v2", "n": 2})]);
        assert_eq!(entries(&[&json!({"id": "else"})]), [] as [Value; 0]);
        assert_eq!(entries(&[&first, &json!({"id": "chat"})]), [] as [Value; 0], "an engine's own");
    }
}
