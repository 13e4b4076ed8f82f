//! Prompts that come as token ids: counted, and hashed without the spaces between them, so that equal ids are equal prompts however they are
//! written.

use router_core::prefix::PromptHasher;

/// Bytes that go to the hasher at a time.
const ROOM_BYTES: usize = 256;

/// A list under a prompt's key, as far as it has come.
#[derive(Debug, Default)]
pub(super) struct List {
    /// Numbers so far, those of inner lists as well.
    ids: usize,
    is_in_number: bool,
    /// Whether something else was in it: from there on it is taken as it stands.
    is_text: bool,
}

impl List {
    /// How many ids it consists of; `None` if of something else.
    pub(super) fn ids(&self) -> Option<usize> {
        Some(self.ids).filter(|_| !self.is_text)
    }

    /// The next part of it.
    pub(super) fn push(&mut self, part: &[u8], prompt: &mut PromptHasher) {
        let (mut room, mut used) = ([0; ROOM_BYTES], 0);
        for (at, &byte) in part.iter().enumerate() {
            if self.is_text
                || !matches!(byte, b'0'..=b'9' | b'-' | b'[' | b']' | b',' | b' ' | b'\t' | b'\n' | b'\r')
            {
                self.is_text = true;
                prompt.push(&room[..used]);
                prompt.push(&part[at..]);
                return;
            }
            let is_number = matches!(byte, b'0'..=b'9' | b'-');
            self.ids += usize::from(is_number && !self.is_in_number);
            self.is_in_number = is_number;
            if byte > b' ' {
                if used == ROOM_BYTES {
                    prompt.push(&room);
                    used = 0;
                }
                room[used] = byte;
                used += 1;
            }
        }
        prompt.push(&room[..used]);
    }
}
