use serde_json::json;

use super::*;

fn render(source: &str, input: &ChatInput<'_>) -> Result<String, TemplateError> {
    ChatTemplate::from_source(source, SpecialTokens { bos: Some("<s>".into()), eos: None })?.render(input)
}

fn chat(messages: &[Value]) -> ChatInput<'_> {
    ChatInput { messages, tools: None, ending: Ending::Opening, extra: None, unix_seconds: 0 }
}

#[test]
fn prints_as_python_does() {
    let messages = [json!({"role": "user", "content": null, "flag": true, "list": [1, "a"], "x": 1.0})];
    let source = "{% set m = messages[0] %}{{ m.content }} {{ m.flag }} {{ m.list }} {{ m.x }} {{ m.none }}|";
    assert_eq!(render(source, &chat(&messages)).unwrap(), "None True [1, 'a'] 1.0 |");
}

#[test]
fn tojson_does_not_escape_html() {
    let messages = [json!({"role": "user", "content": "<a> & 'b' é"})];
    assert_eq!(render("{{ messages[0].content | tojson }}", &chat(&messages)).unwrap(), r#""<a> & 'b' é""#);
    let source = "{{ messages[0] | tojson(indent=1, ensure_ascii=True, sort_keys=true) }}";
    let expected = "{\n \"content\": \"<a> & 'b' \\u00e9\",\n \"role\": \"user\"\n}";
    assert_eq!(render(source, &chat(&messages)).unwrap(), expected);
}

#[test]
fn a_template_can_refuse() {
    let error = render("{{ raise_exception('no ' ~ messages | length) }}", &chat(&[])).unwrap_err();
    assert!(matches!(&error, TemplateError::Refused(message) if message == "no 0"), "{error:?}");
}

#[test]
fn a_message_is_gone_on_with_where_its_content_ends() {
    const PLAIN: &str = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}{% if add_generation_prompt %}[open]{% endif %}";
    let trims = PLAIN.replace("m.content", "m.content | trim");
    let question = json!({"role": "user", "content": "say it: The sky"});
    let render = |source: &str, content: &str, ending| {
        let messages = [question.clone(), json!({"role": "assistant", "content": content})];
        render(source, &ChatInput { ending, ..chat(&messages) })
    };
    let before = "<question>[assistant]".replace("<question>", "[user]say it: The sky[end]");
    for (source, content, expected) in [
        (PLAIN, "The sky", "The sky"),
        (PLAIN, " The sky \n", " The sky \n"),
        (&trims, " The sky \n", "The sky \n"),
        (&trims, "The sky", "The sky"),
        (PLAIN, "e", "e"),
        (PLAIN, "\n", "\n"),
    ] {
        assert_eq!(render(source, content, Ending::Within).unwrap(), before.clone() + expected);
    }
    assert!(render(PLAIN, "x", Ending::Closed).unwrap().ends_with("x[end]"));
    let refused = render("nothing of it", "x", Ending::Within).unwrap_err();
    assert!(matches!(refused, TemplateError::Message { index: 1, .. }), "{refused:?}");
    let none = [json!({"role": "assistant", "content": null})];
    assert!(super::tests::render(PLAIN, &ChatInput { ending: Ending::Within, ..chat(&none) }).is_err());
}

#[test]
fn the_time_is_the_callers() {
    let input = ChatInput { unix_seconds: 1_721_984_703, ..chat(&[]) };
    assert_eq!(render("{{ strftime_now('%d %b %Y') }}", &input).unwrap(), "26 Jul 2024");
}

#[test]
fn generation_tags_print_nothing() {
    let source = "a\n{%- generation -%}\n b \n{%- endgeneration %}\nc{% generation %}d{% endgeneration %}";
    assert_eq!(render(source, &chat(&[])).unwrap(), "abcd");
}

#[test]
fn tools_choose_the_tool_template() {
    let config = json!({"chat_template": [
        {"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools {{ tools | length }}"}]});
    let template = ChatTemplate::from_files(Some(config.to_string().as_bytes()), None).unwrap();
    let tools = [json!({"type": "function"})];
    assert_eq!(template.render(&chat(&[])).unwrap(), "plain");
    assert_eq!(template.render(&ChatInput { tools: Some(&tools), ..chat(&[]) }).unwrap(), "tools 1");
}

#[test]
fn the_jinja_file_wins_and_tokens_come_from_the_config() {
    let config = json!({"chat_template": "config", "bos_token": {"content": "<b>"}, "eos_token": "</b>"});
    let config = config.to_string();
    let template =
        ChatTemplate::from_files(Some(config.as_bytes()), Some("{{ bos_token }}{{ eos_token }}")).unwrap();
    assert_eq!(template.render(&chat(&[])).unwrap(), "<b></b>");
}

#[test]
fn says_what_is_wrong_with_the_files() {
    let missing = ChatTemplate::from_files(Some(b"{}"), None).unwrap_err();
    assert!(matches!(missing, TemplateError::Missing));
    assert!(matches!(ChatTemplate::from_files(Some(b"{"), None).unwrap_err(), TemplateError::Config(_)));
    let syntax = ChatTemplate::from_files(None, Some("{% if %}")).unwrap_err();
    assert!(matches!(syntax, TemplateError::Syntax { .. }), "{syntax:?}");
}

#[test]
fn a_template_that_never_ends_is_stopped() {
    let endless = "{% for a in range(9999) %}{% for b in range(9999) %}x{% endfor %}{% endfor %}";
    let error = render(endless, &chat(&[])).unwrap_err();
    assert!(matches!(error, TemplateError::Render(_)), "{error:?}");
}
