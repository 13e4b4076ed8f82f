//! Texts in a list of instructions, less the one that is none: Claude Code puts a line first that names its version and a hash of
//! the request, anew each time. vLLM leaves it out of the prompt; with it no two requests would share anything behind the tools.

use router_core::prefix::PromptHasher;

/// What that line begins with.
const MARK: &[u8] = b"x-anthropic-billing-header";

/// A text of the instructions, as far as it has come.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SystemText {
    /// How many bytes of the mark it has begun with.
    marked_bytes: usize,
    /// Whether it has gone on otherwise.
    is_said: bool,
}

impl SystemText {
    /// The next part of it.
    pub(super) fn push(&mut self, part: &[u8], prompt: &mut PromptHasher) {
        let missing = &MARK[self.marked_bytes..];
        if !self.is_said && !missing.is_empty() {
            let begun = &part[..part.len().min(missing.len())];
            if missing.starts_with(begun) {
                self.marked_bytes += begun.len();
                return;
            }
            self.say_mark(prompt);
        }
        if self.is_said {
            prompt.push_system(part);
        }
    }

    /// It has ended.
    pub(super) fn finish(&mut self, prompt: &mut PromptHasher) {
        if !self.is_said && self.marked_bytes < MARK.len() {
            self.say_mark(prompt);
        }
    }

    /// What looked like the mark was none.
    fn say_mark(&mut self, prompt: &mut PromptHasher) {
        self.is_said = true;
        prompt.push_system(&MARK[..self.marked_bytes]);
    }
}
