//! Before stage 4, for requests in the background: they wait until a worker has time to spare, and are no load meanwhile.
//!
//! Of those who wait for the same whoever is first looks for time every now and then, and wakes whoever comes next when it goes. What a request holds while it waits is
//! its connection and its body, so how many may wait is bounded.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use router_core::backlog::{Backlog, BacklogTicket};
use router_core::request::Leg;
use router_core::worker::Role;
use router_core::{Among, PickError, Precedence, RequestView};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until, timeout_at};
use xxhash_rust::xxh3::xxh3_64;

use super::pick::{Picked, Wait, pick_spare};
use crate::app::App;
use crate::body_memory::BodyShare;
use crate::error::RequestError;

/// How often whoever is first looks: a step of an engine takes about as long.
const LOOKS_EVERY: Duration = Duration::from_millis(20);
/// Where so many are first, each for something else; of twice as many each looks half as often, since a look is a walk over the workers.
const ALIKE_AT_ONCE: usize = 8;
/// Who is not first looks whether he is, should nobody have told him.
const ASKS_EVERY: Duration = Duration::from_secs(1);

/// Those who wait.
#[derive(Debug)]
pub struct Backlogs {
    alike: Mutex<HashMap<Alike, Together>>,
    count: AtomicUsize,
    most: usize,
}

/// What those have in common who wait for the same: of others nobody is first because one of these waits in vain.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Alike {
    model: String,
    role: Role,
    /// Hash of where it may not go, if it may not go everywhere: it has been there, or a gateway says where it may.
    bound: Option<u64>,
}

impl Alike {
    fn of(view: &RequestView<'_>, among: Among<'_>) -> Self {
        let bound = match among {
            Among::Untried(tried) if !tried.is_empty() => {
                let mut slots: Vec<u32> = tried.iter().map(|slot| slot.0).collect();
                slots.sort_unstable();
                let bytes: Vec<u8> = slots.into_iter().flat_map(u32::to_le_bytes).collect();
                Some(xxh3_64(&bytes))
            }
            Among::Untried(_) | Among::Anyone => None,
        };
        Self { model: view.model.unwrap_or_default().to_owned(), role: view.leg.role(), bound }
    }
}

#[derive(Debug, Default)]
struct Together {
    backlog: Backlog,
    bells: HashMap<BacklogTicket, Arc<Notify>>,
}

impl Together {
    fn wake_first(&self) {
        let first = self.backlog.first().and_then(|ticket| self.bells.get(&ticket));
        first.into_iter().for_each(|bell| bell.notify_one());
    }
}

impl Backlogs {
    /// Room for so many.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self { alike: Mutex::default(), count: AtomicUsize::new(0), most }
    }

    /// How many wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// Whether another one may come, which holds `share`.
    ///
    /// # Errors
    /// When as many wait as may, or bodies hold a quarter of what they may: those that nobody waits for must not keep out the others.
    pub fn check(&self, share: &BodyShare) -> Result<(), RequestError> {
        let has_room = self.waiting() < self.most && share.may_wait();
        if has_room { Ok(()) } else { Err(RequestError::TooManyInBackground { limit: self.most }) }
    }

    fn enter(&self, view: &RequestView<'_>, among: Among<'_>) -> Place<'_> {
        let (alike, whose) = (Alike::of(view, among), view.precedence);
        let bell = Arc::<Notify>::default();
        let mut all = self.lock();
        let together = all.entry(alike.clone()).or_default();
        let ticket = together.backlog.enter(whose);
        together.bells.insert(ticket, Arc::clone(&bell));
        together.wake_first();
        self.count.fetch_add(1, Ordering::Relaxed);
        Place { backlogs: self, alike, whose, ticket, bell, sent_tokens: 0 }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Alike, Together>> {
        // Nothing that holds it can panic half-way through a change.
        self.alike.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A place in the backlog; left when dropped, also by a client that leaves.
struct Place<'a> {
    backlogs: &'a Backlogs,
    alike: Alike,
    whose: Precedence,
    ticket: BacklogTicket,
    bell: Arc<Notify>,
    /// Of its prompt, once it is sent.
    sent_tokens: usize,
}

impl Place<'_> {
    /// How long to wait for another look, if it is first.
    fn looks_again_after(&self) -> Option<Duration> {
        let all = self.backlogs.lock();
        let together = all.get(&self.alike)?;
        let times = u32::try_from(all.len() / ALIKE_AT_ONCE).unwrap_or(u32::MAX);
        (together.backlog.first() == Some(self.ticket)).then(|| LOOKS_EVERY.saturating_mul(1 + times))
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut all = self.backlogs.lock();
        self.backlogs.count.fetch_sub(1, Ordering::Relaxed);
        let Some(together) = all.get_mut(&self.alike) else { return };
        together.backlog.leave(self.whose, self.ticket, self.sent_tokens);
        together.bells.remove(&self.ticket);
        if together.backlog.is_empty() {
            all.remove(&self.alike);
        } else {
            together.wake_first();
        }
    }
}

/// Waits until a worker `among` those that are left has time to spare, and picks it; also while all are down, since nobody waits for the answer, unless
/// others could do what these are asked for.
///
/// # Errors
/// When there is none that could, now or later, or `deadline` has come.
pub async fn pick_when_spare(
    app: &App,
    view: &RequestView<'_>,
    among: Among<'_>,
    (deadline, limit): (Instant, Duration),
) -> Result<Picked, RequestError> {
    let _wait = Wait::begins(&app.metrics.background_seconds);
    let mut place = app.backlogs.enter(view, among);
    let can_do_without = view.leg == Leg::Prefill && app.settings.prefill_protocol.generates_alone();
    loop {
        if let Some(again) = place.looks_again_after() {
            match pick_spare(app, view, among, app.now()) {
                Err(PickError::NoneSpare) => sleep_until(deadline.min(Instant::now() + again)).await,
                Err(PickError::NoneUsable { .. } | PickError::ModelDown { .. }) if !can_do_without => {
                    sleep_until(deadline.min(Instant::now() + again)).await;
                }
                picked => {
                    let picked = picked?;
                    place.sent_tokens = view.prompt_tokens.max(1);
                    return Ok(picked);
                }
            }
        } else {
            // Whoever is first is woken; that time has run out is seen below.
            let _ = timeout_at(deadline.min(Instant::now() + ASKS_EVERY), place.bell.notified()).await;
        }
        if Instant::now() >= deadline {
            return Err(RequestError::NoSpare { limit });
        }
    }
}

#[cfg(test)]
mod tests {
    use router_core::{Priority, WorkerSlot};

    use super::*;
    use crate::body_memory::BodyMemory;

    const ANYWHERE: Among<'static> = Among::Untried(&[]);

    fn view(model: &str, priority: i8) -> RequestView<'_> {
        let precedence = Precedence { priority: Priority(priority), tenant: None };
        RequestView { model: Some(model), precedence, ..RequestView::default() }
    }

    #[tokio::test]
    async fn whoever_is_first_leaves_the_next_one_in_its_place() {
        let backlogs = Backlogs::new(9);
        let (first, second) =
            (backlogs.enter(&view("m", -1), ANYWHERE), backlogs.enter(&view("m", -1), ANYWHERE));
        let other = backlogs.enter(&view("another", -1), ANYWHERE);
        let is_first = |place: &Place<'_>| place.looks_again_after() == Some(LOOKS_EVERY);
        assert!(is_first(&first) && !is_first(&second) && is_first(&other));
        first.bell.notified().await;
        let before = backlogs.enter(&view("m", 0), ANYWHERE);
        assert!(is_first(&before) && !is_first(&first), "a higher priority");
        drop(before);
        first.bell.notified().await;
        drop(first);
        second.bell.notified().await;
        assert!(is_first(&second));
        assert_eq!(backlogs.waiting(), 2);
        drop((second, other));
        assert_eq!((backlogs.waiting(), backlogs.lock().len()), (0, 0));
    }

    #[tokio::test]
    async fn who_waits_for_something_else_is_first_of_its_own() {
        let backlogs = Backlogs::new(9);
        let prefill = RequestView { leg: Leg::Prefill, ..view("m", -1) };
        let places = [
            backlogs.enter(&view("m", -1), ANYWHERE),
            backlogs.enter(&prefill, ANYWHERE),
            backlogs.enter(&view("m", -1), Among::Untried(&[WorkerSlot(0)])),
            backlogs.enter(&view("m", -1), Among::Untried(&[WorkerSlot(2), WorkerSlot(1)])),
        ];
        assert!(places.iter().all(|place| place.looks_again_after().is_some()));
    }

    #[test]
    fn the_more_models_the_more_rarely_each_looks() {
        let backlogs = Backlogs::new(99);
        let names: Vec<_> = (0..16).map(|number| number.to_string()).collect();
        let places: Vec<_> = names.iter().map(|name| backlogs.enter(&view(name, -1), ANYWHERE)).collect();
        assert!(places.iter().all(|place| place.looks_again_after() == Some(3 * LOOKS_EVERY)));
    }

    #[test]
    fn no_more_wait_than_may_and_their_bodies_leave_room_for_others() {
        let memory = BodyMemory::new(100, 100);
        let (backlogs, mut share) = (Backlogs::new(2), memory.share(0));
        let places = [backlogs.enter(&view("m", -1), ANYWHERE)];
        assert!(backlogs.check(&share).is_ok());
        share.grow(26).unwrap();
        assert!(matches!(backlogs.check(&share), Err(RequestError::TooManyInBackground { limit: 2 })));
        share.give_back();
        let more = backlogs.enter(&view("m", -1), ANYWHERE);
        assert!(backlogs.check(&share).is_err());
        drop((places, more));
        assert!(backlogs.check(&share).is_ok());
    }
}
