//! Names that stand for models: `NAME MODEL`, or `NAME MODEL=95 MODEL=5`.

/// A name that clients may ask for, and the models that are meant by it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ModelAlias {
    /// As requests have it.
    pub name: String,
    /// Models, as engines list them, and how many parts of the requests each gets; one with none gets what no other can serve. At least one.
    pub models: Vec<(String, u32)>,
}

/// Reads all items of a list; what is wrong goes to `errors`.
pub(super) fn parse_model_aliases(list: &[String], errors: &mut Vec<String>) -> Vec<ModelAlias> {
    let mut all: Vec<ModelAlias> = Vec::with_capacity(list.len());
    for item in list {
        match parse_item(item) {
            Ok(alias) if all.iter().any(|other| other.name == alias.name) => {
                errors.push(format!("model-aliases: {:?} is named twice", alias.name));
            }
            Ok(alias) => all.push(alias),
            Err(error) => errors.push(format!("model-aliases: {error}")),
        }
    }
    // A name could mean one thing directly and another by way of a second name. (It may be one of its own models.)
    for ModelAlias { name, models } in &all {
        let is_another = |model: &String| model != name && all.iter().any(|other| other.name == *model);
        for (model, _) in models.iter().filter(|(model, _)| is_another(model)) {
            errors.push(format!(
                "model-aliases: {name:?} stands for {model:?}, which stands for others itself"
            ));
        }
    }
    all
}

fn parse_item(item: &str) -> Result<ModelAlias, String> {
    let wrong = |why: &str| format!("{item:?}: {why}; write NAME MODEL, or NAME MODEL=95 MODEL=5");
    let mut words = item.split_whitespace();
    let name = words.next().ok_or_else(|| wrong("names nothing"))?.to_owned();
    let words: Vec<&str> = words.collect();
    let models = match words[..] {
        [] => return Err(wrong("has a name and no model")),
        // Of one model all is its part; its name may have an = in it.
        [model] if part(model).is_none() => vec![(model.to_owned(), 1)],
        _ => words
            .into_iter()
            .map(|word| part(word).ok_or_else(|| wrong(&format!("{word:?} is no MODEL=PARTS"))))
            .collect::<Result<Vec<_>, _>>()?,
    };
    if models.iter().all(|(_, parts)| *parts == 0) {
        return Err(wrong("no model has a part"));
    }
    let twice = models
        .iter()
        .enumerate()
        .find(|(at, (model, _))| models[..*at].iter().any(|(other, _)| other == model));
    if let Some((_, (model, _))) = twice {
        return Err(wrong(&format!("{model:?} is named twice")));
    }
    Ok(ModelAlias { name, models })
}

/// `MODEL=PARTS`.
fn part(word: &str) -> Option<(String, u32)> {
    let (model, parts) = word.rsplit_once('=')?;
    Some((model.to_owned(), parts.parse().ok()?)).filter(|(model, _)| !model.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(list: &[&str]) -> (Vec<ModelAlias>, Vec<String>) {
        let list: Vec<_> = list.iter().map(|item| (*item).to_owned()).collect();
        let mut errors = Vec::new();
        (parse_model_aliases(&list, &mut errors), errors)
    }

    #[test]
    fn reads_names_and_what_they_stand_for() {
        let (all, errors) = parse(&[
            "gpt-4o  org/llama:8b",
            "chat v1=95 v2=5",
            "one a=b",
            "safe main=1 spare=0",
            "m m=9 n=1",
        ]);
        assert_eq!(errors, Vec::<String>::new());
        let models = |models: &[(&str, u32)]| -> Vec<(String, u32)> {
            models.iter().map(|(model, parts)| ((*model).to_owned(), *parts)).collect()
        };
        let read: Vec<_> = all.into_iter().map(|one| (one.name, one.models)).collect();
        let expected = [
            ("gpt-4o".to_owned(), models(&[("org/llama:8b", 1)])),
            ("chat".to_owned(), models(&[("v1", 95), ("v2", 5)])),
            ("one".to_owned(), models(&[("a=b", 1)])),
            ("safe".to_owned(), models(&[("main", 1), ("spare", 0)])),
            ("m".to_owned(), models(&[("m", 9), ("n", 1)])),
        ];
        assert_eq!(read, expected);
    }

    #[test]
    fn everything_wrong_is_said_and_what_would_be_right() {
        let list =
            ["", "a", "b x y", "c x=1 y=-1", "d x=0 y=0", "e x=1 x=2", "f x", "f y", "g f", "h =1 y=2"];
        let (all, errors) = parse(&list);
        assert_eq!((all.len(), errors.len()), (2, 9), "{errors:#?}");
        for (error, expected) in errors.iter().zip([
            "names nothing",
            "no model",
            "\"x\" is no MODEL=PARTS",
            "\"y=-1\" is no MODEL=PARTS",
            "no model has a part",
            "\"x\" is named twice",
            "\"f\" is named twice",
            "\"=1\" is no MODEL=PARTS",
            "\"g\" stands for \"f\"",
        ]) {
            assert!(error.contains(expected), "{error}");
        }
        assert!(errors[0].contains("write NAME MODEL"));
    }
}
