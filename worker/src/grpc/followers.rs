//! Routers that follow the load, by the numbers they gave: each is told its place among them, so that routers which share workers, and
//! nothing else, can divide them.

use std::collections::BTreeMap;
use std::sync::Arc;

use roundhouse_types::RouterPlace;
use tokio::sync::watch;

/// Streams of each router, by its number; two for a moment, when one broke that is not known to have.
type Streams = BTreeMap<u64, usize>;

/// All routers that follow now. As many as have a stream open.
#[derive(Debug, Default)]
pub(super) struct Followers(watch::Sender<Streams>);

/// One router's stream; dropping it leaves.
#[derive(Debug)]
pub(super) struct Follower {
    all: Arc<Followers>,
    number: u64,
    streams: watch::Receiver<Streams>,
    place: RouterPlace,
}

impl Followers {
    /// Enters a stream of the router of that number.
    pub(super) fn enter(self: &Arc<Self>, number: u64) -> Follower {
        self.0.send_modify(|streams| *streams.entry(number).or_default() += 1);
        let mut streams = self.0.subscribe();
        streams.mark_changed();
        Follower { all: Arc::clone(self), number, streams, place: RouterPlace::ALONE }
    }
}

impl Follower {
    /// The router's place now.
    pub(super) fn place(&mut self) -> RouterPlace {
        if self.streams.has_changed().unwrap_or(false) {
            let streams = self.streams.borrow_and_update();
            let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
            let rank = streams.range(..self.number).count();
            self.place = RouterPlace { rank: count(rank), count: count(streams.len()) };
        }
        self.place
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.all.0.send_modify(|streams| {
            let left = streams.get_mut(&self.number).map(|streams| {
                *streams -= 1;
                *streams
            });
            if left == Some(0) {
                streams.remove(&self.number);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_by_number_and_follow_who_comes_and_goes() {
        let all = Arc::new(Followers::default());
        let mut seven = all.enter(7);
        assert_eq!(seven.place(), RouterPlace::ALONE);
        let (mut nine, mut three) = (all.enter(9), all.enter(3));
        let places = [three.place(), seven.place(), nine.place()];
        assert_eq!(places, [0, 1, 2].map(|rank| RouterPlace { rank, count: 3 }));
        let again = all.enter(3);
        drop(three);
        assert_eq!(
            seven.place(),
            RouterPlace { rank: 1, count: 3 },
            "its old stream has ended, its new one not"
        );
        drop(again);
        assert_eq!([seven.place(), nine.place()], [0, 1].map(|rank| RouterPlace { rank, count: 2 }));
    }
}
