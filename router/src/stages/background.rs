//! Before stage 4, for requests in the background: they wait until a worker has time to spare, and are no load meanwhile.
//!
//! Of each model whoever is first looks for time every now and then, and wakes whoever comes next when it goes. What a request holds while it waits is
//! its connection and its body, so how many may wait is bounded.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use router_core::backlog::{Backlog, BacklogTicket};
use router_core::{Among, PickError, Precedence, RequestView};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::pick::{Picked, pick_spare};
use crate::app::App;
use crate::body_memory::BodyShare;
use crate::error::RequestError;

/// How often whoever is first looks: a step of an engine takes about as long.
const LOOKS_EVERY: Duration = Duration::from_millis(20);
/// Of so many models; of twice as many each looks half as often, since a look is a walk over the workers.
const MODELS_AT_ONCE: usize = 8;
/// Who is not first looks whether he is, should nobody have told him.
const ASKS_EVERY: Duration = Duration::from_secs(1);

/// Those who wait, by the model that they ask for.
#[derive(Debug)]
pub struct Backlogs {
    by_model: Mutex<HashMap<String, OfModel>>,
    count: AtomicUsize,
    most: usize,
}

#[derive(Debug, Default)]
struct OfModel {
    backlog: Backlog,
    bells: HashMap<BacklogTicket, Arc<Notify>>,
}

impl OfModel {
    fn wake_first(&self) {
        let first = self.backlog.first().and_then(|ticket| self.bells.get(&ticket));
        first.into_iter().for_each(|bell| bell.notify_one());
    }
}

impl Backlogs {
    /// Room for so many.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self { by_model: Mutex::default(), count: AtomicUsize::new(0), most }
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

    fn enter(&self, view: &RequestView<'_>) -> Place<'_> {
        let (model, whose) = (view.model.unwrap_or_default().to_owned(), view.precedence);
        let bell = Arc::<Notify>::default();
        let mut by_model = self.lock();
        let of_model = by_model.entry(model.clone()).or_default();
        let ticket = of_model.backlog.enter(whose);
        of_model.bells.insert(ticket, Arc::clone(&bell));
        of_model.wake_first();
        self.count.fetch_add(1, Ordering::Relaxed);
        Place { backlogs: self, model, whose, ticket, bell, sent_tokens: 0 }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, OfModel>> {
        // Nothing that holds it can panic half-way through a change.
        self.by_model.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A place in the backlog; left when dropped, also by a client that leaves.
struct Place<'a> {
    backlogs: &'a Backlogs,
    model: String,
    whose: Precedence,
    ticket: BacklogTicket,
    bell: Arc<Notify>,
    /// Of its prompt, once it is sent.
    sent_tokens: usize,
}

impl Place<'_> {
    /// How long to wait for another look, if it is first.
    fn looks_again_after(&self) -> Option<Duration> {
        let by_model = self.backlogs.lock();
        let of_model = by_model.get(&self.model)?;
        let models = u32::try_from(by_model.len() / MODELS_AT_ONCE).unwrap_or(u32::MAX);
        (of_model.backlog.first() == Some(self.ticket)).then(|| LOOKS_EVERY.saturating_mul(1 + models))
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut by_model = self.backlogs.lock();
        self.backlogs.count.fetch_sub(1, Ordering::Relaxed);
        let Some(of_model) = by_model.get_mut(&self.model) else { return };
        of_model.backlog.leave(self.whose, self.ticket, self.sent_tokens);
        of_model.bells.remove(&self.ticket);
        if of_model.backlog.is_empty() {
            by_model.remove(&self.model);
        } else {
            of_model.wake_first();
        }
    }
}

/// Waits until a worker `among` those that are left has time to spare, and picks it; also while all are down, since nobody waits for the answer.
///
/// # Errors
/// When there is none that could, now or later, or `deadline` has come.
pub async fn pick_when_spare(
    app: &App,
    view: &RequestView<'_>,
    among: Among<'_>,
    (deadline, limit): (Instant, Duration),
) -> Result<Picked, RequestError> {
    let began = Instant::now();
    let mut place = app.backlogs.enter(view);
    loop {
        if let Some(again) = place.looks_again_after() {
            match pick_spare(app, view, among, app.now()) {
                Err(PickError::NoneSpare | PickError::NoneUsable { .. } | PickError::ModelDown { .. }) => {
                    sleep_until(deadline.min(Instant::now() + again)).await;
                }
                picked => {
                    let picked = picked?;
                    place.sent_tokens = view.prompt_tokens.max(1);
                    app.metrics.background_seconds.observe(began.elapsed().as_secs_f64());
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
    use router_core::Priority;

    use super::*;
    use crate::body_memory::BodyMemory;

    fn view(model: &str, priority: i8) -> RequestView<'_> {
        let precedence = Precedence { priority: Priority(priority), tenant: None };
        RequestView { model: Some(model), precedence, ..RequestView::default() }
    }

    #[tokio::test]
    async fn whoever_is_first_leaves_the_next_one_in_its_place() {
        let backlogs = Backlogs::new(9);
        let (first, second) = (backlogs.enter(&view("m", -1)), backlogs.enter(&view("m", -1)));
        let other = backlogs.enter(&view("another", -1));
        let is_first = |place: &Place<'_>| place.looks_again_after() == Some(LOOKS_EVERY);
        assert!(is_first(&first) && !is_first(&second) && is_first(&other));
        first.bell.notified().await;
        let before = backlogs.enter(&view("m", 0));
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

    #[test]
    fn the_more_models_the_more_rarely_each_looks() {
        let backlogs = Backlogs::new(99);
        let names: Vec<_> = (0..16).map(|number| number.to_string()).collect();
        let places: Vec<_> = names.iter().map(|name| backlogs.enter(&view(name, -1))).collect();
        assert!(places.iter().all(|place| place.looks_again_after() == Some(3 * LOOKS_EVERY)));
    }

    #[test]
    fn no_more_wait_than_may_and_their_bodies_leave_room_for_others() {
        let memory = BodyMemory::new(100, 100);
        let (backlogs, mut share) = (Backlogs::new(2), memory.share(0));
        let places = [backlogs.enter(&view("m", -1))];
        assert!(backlogs.check(&share).is_ok());
        share.grow(26).unwrap();
        assert!(matches!(backlogs.check(&share), Err(RequestError::TooManyInBackground { limit: 2 })));
        share.give_back();
        let more = backlogs.enter(&view("m", -1));
        assert!(backlogs.check(&share).is_err());
        drop((places, more));
        assert!(backlogs.check(&share).is_ok());
    }
}
