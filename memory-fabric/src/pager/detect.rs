//! Detects streams in the sequence of faults, and predicts the next pages. No I/O and no clock.
//!
//! Two tables observe the faults. *Near* streams are regions of memory with nearby accesses; each
//! belongs to a thread until it has a stride, and then to any thread that follows it. Many vCPUs,
//! or one that walks through several arrays, thus do not disturb each other. *Sources* are threads,
//! each with the distances between its last accesses anywhere: strides that exceed a region are
//! detected here.
//!
//! The thread of a fault is not always the vCPU's: KVM resolves faults of a guest with an in-kernel
//! interrupt controller through kernel threads, a different one each time. Every access is
//! therefore also recorded as one of [`ANY`], a source that stands for all threads, whose streams
//! are defined by address alone. They detect patterns across changing threads, and fail where
//! several threads with separate streams meet; the streams of the thread itself take precedence. In
//! all of these the stride is determined by majority vote (Boyer and Moore, 1981) over the last 4
//! distances, and then 8, as Leap does it for a process (Al Maruf and Chowdhury, USENIX ATC 2020).
//!
//! A stream with a stride gets pages ordered ahead of it. Its window doubles each time that it has
//! advanced by a whole window. Pages that were ordered and evicted untouched count against all
//! streams: with much waste the largest window halves, and a stream needs more steps before its
//! first order.

/// Limit of watched streams: an access that belongs to none takes two entries.
const STREAMS: usize = 64;

/// Limit of watched threads.
const SOURCES: usize = 64;

/// The source that stands for all threads. No thread has this id.
const ANY: u32 = u32::MAX;

/// The source of an access whose thread is not known.
const UNKNOWN: u32 = 0;

/// Distance within which an access belongs to a stream without a stride.
const REACH: i64 = 32;

/// Number of distances in a history.
const HISTORY: usize = 8;

/// Smallest window, pages.
const WINDOW_MIN: u32 = 4;

/// Largest window of a new detector, pages; see [`Policy`](crate::policy::Policy).
pub(super) const WINDOW_MAX: u32 = 128;

/// Limit of pages that are mapped along with a touched one: a quarter of the largest window when it
/// was chosen, so that a stream which ends has few of them.
pub(super) const CHAIN_MAX: u32 = 32;

/// Steps that a stream must have made before pages are ordered for it: with good predictions, and
/// with many wasted ones.
const STREAK_MIN: u32 = 2;
const STREAK_DOUBTED: u32 = 8;

/// Number of used or wasted pages after which the largest window is reviewed.
const REVIEW_PAGES: u64 = 256;

/// Pages to prefetch: `first`, and further ones in steps of `stride`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Order {
    pub first: u32,
    pub stride: i32,
    pub count: u32,
    /// Number of pages that are mapped when one is touched.
    pub chain: u32,
}

/// The distances between the last accesses.
#[derive(Clone, Copy, Debug, Default)]
struct History {
    deltas: [i32; HISTORY],
    /// Number of distances, up to a whole history.
    filled: usize,
    next: usize,
}

impl History {
    fn push(&mut self, delta: i32) {
        self.deltas[self.next] = delta;
        self.next = (self.next + 1) % HISTORY;
        self.filled = (self.filled + 1).min(HISTORY);
    }

    /// Returns the last `count` distances.
    fn last(&self, count: usize) -> impl Iterator<Item = i32> {
        (1..=count).map(|back| self.deltas[(self.next + HISTORY - back) % HISTORY])
    }

    /// Returns the distance that more than half of the last few have, or the last two if they are
    /// equal and nothing else is known.
    fn trend(&self) -> Option<i32> {
        if self.filled < HISTORY / 2 {
            let mut last = self.last(2);
            return (self.filled >= 2 && last.next() == last.next())
                .then(|| self.last(1).next())
                .flatten();
        }
        [HISTORY / 2, HISTORY]
            .into_iter()
            .filter(|&count| self.filled >= count)
            .find_map(|count| self.majority(count))
    }

    fn majority(&self, count: usize) -> Option<i32> {
        let (mut candidate, mut votes) = (0, 0);
        for delta in self.last(count) {
            if votes == 0 {
                candidate = delta;
            }
            votes += if delta == candidate { 1 } else { -1 };
        }
        let held = self.last(count).filter(|&delta| delta == candidate).count();
        (held * 2 > count && candidate != 0).then_some(candidate)
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Stream {
    source: u32,
    last: u32,
    history: History,
    /// 0 while unknown.
    stride: i32,
    /// Steps made with this stride.
    streak: u32,
    /// Steps made since the window grew.
    progress: u32,
    window: u32,
    /// Steps from `last` to the farthest page that was ordered.
    lead: u32,
    /// When it was last followed; 0 when the entry is free.
    used_at: u64,
}

/// A thread and its distances.
#[derive(Clone, Copy, Debug, Default)]
struct Source {
    source: u32,
    last: u32,
    history: History,
    used_at: u64,
}

/// Observes accesses that faulted, and predicts the next.
#[derive(Debug)]
pub(super) struct Detector {
    streams: [Stream; STREAMS],
    sources: [Source; SOURCES],
    /// Number of accesses so far, which gives the age of entries.
    clock: u64,
    window_max: u32,
    /// Upper bound of the window while predictions are good.
    window_limit: u32,
    /// Counts at the last review.
    reviewed: (u64, u64),
}

impl Detector {
    pub(super) fn new() -> Self {
        Self {
            streams: [Stream::default(); STREAMS],
            sources: [Source::default(); SOURCES],
            clock: 0,
            window_max: WINDOW_MAX,
            window_limit: WINDOW_MAX,
            reviewed: (0, 0),
        }
    }

    /// Records that thread `source` touched `page`. Returns the pages to fetch now, if any.
    pub(super) fn observe(&mut self, source: u32, page: u32) -> Option<Order> {
        self.clock += 1;
        let own = (source != UNKNOWN).then_some(source);
        let far_any = self.far_trend(ANY, page);
        let far_own = own.and_then(|source| self.far_trend(source, page));
        if let Some(index) = self.followed(page) {
            return self.advance(index, page);
        }
        if let Some(stride) = far_own.or(far_any) {
            let index = self.oldest();
            self.streams[index] = Stream {
                source,
                last: page,
                stride,
                streak: STREAK_MIN,
                window: WINDOW_MIN,
                used_at: self.clock,
                ..Stream::default()
            };
            return self.order(index);
        }
        own.and_then(|source| self.step_near(source, page))
            .or_else(|| self.step_near(ANY, page))
    }

    /// Handles an access of `source` that follows no stream: it continues a nearby stream, or
    /// starts another.
    fn step_near(&mut self, source: u32, page: u32) -> Option<Order> {
        let Some(index) = self.near(source, page) else {
            let index = self.oldest();
            self.streams[index] = Stream {
                source,
                last: page,
                window: WINDOW_MIN,
                used_at: self.clock,
                ..Stream::default()
            };
            return None;
        };
        let clock = self.clock;
        let stream = &mut self.streams[index];
        let delta = distance(stream.last, page);
        stream.used_at = clock;
        // Within reach, so it fits.
        let delta = i32::try_from(delta).unwrap_or(0);
        if delta == 0 {
            return None;
        }
        stream.last = page;
        stream.history.push(delta);
        stream.stride = stream.history.trend().unwrap_or(0);
        stream.streak = if stream.stride == 0 { 0 } else { STREAK_MIN };
        self.order(index)
    }

    #[cfg(test)]
    pub(super) fn window_limit(&self) -> u32 {
        self.window_limit
    }

    /// Sets the largest window that the links allow. A window at the limit stays at it.
    pub(super) fn limit_windows(&mut self, pages: u32) {
        if self.window_limit != pages {
            let at_limit = self.window_max == self.window_limit;
            self.window_max = if at_limit {
                pages
            } else {
                self.window_max.min(pages)
            };
            self.window_limit = pages;
        }
    }

    /// Reviews the largest window, given the numbers of prefetched pages that were touched, and
    /// evicted untouched.
    pub(super) fn review(&mut self, used: u64, wasted: u64) {
        let (used_before, wasted_before) = self.reviewed;
        let (good, bad) = (
            used.saturating_sub(used_before),
            wasted.saturating_sub(wasted_before),
        );
        if good + bad < REVIEW_PAGES {
            return;
        }
        self.reviewed = (used, wasted);
        if bad > good {
            self.window_max = (self.window_max / 2).max(WINDOW_MIN);
        } else if good > bad * 3 {
            self.window_max = (self.window_max * 2).min(self.window_limit);
        }
    }

    /// Returns the stride of a thread whose accesses are too far apart for a stream.
    fn far_trend(&mut self, source: u32, page: u32) -> Option<i32> {
        let clock = self.clock;
        let known = self
            .sources
            .iter()
            .position(|known| known.used_at > 0 && known.source == source);
        let index = known.unwrap_or_else(|| oldest(self.sources.iter().map(|s| s.used_at)));
        let entry = &mut self.sources[index];
        if known.is_none() {
            *entry = Source {
                source,
                ..Source::default()
            };
        } else if let Ok(delta) = i32::try_from(distance(entry.last, page)) {
            entry.history.push(delta);
        }
        entry.last = page;
        entry.used_at = clock;
        if entry.history.filled < HISTORY / 2 {
            return None;
        }
        let trend = entry.history.trend()?;
        // A stride as small as those of streams belongs to a stream.
        (i64::from(trend).abs() > REACH && entry.history.last(1).next() == Some(trend))
            .then_some(trend)
    }

    /// Returns the stride of the stream that leads to `page`, if one does.
    pub(super) fn stride_to(&self, page: u32) -> Option<i32> {
        let index = self.followed(page)?;
        Some(self.streams[index].stride)
    }

    /// Returns the stream that leads to `page`.
    fn followed(&self, page: u32) -> Option<usize> {
        self.streams
            .iter()
            .position(|stream| stream.used_at > 0 && steps(stream, page).is_some())
    }

    /// Returns the nearest stream of `source` without a stride.
    fn near(&self, source: u32, page: u32) -> Option<usize> {
        let mine =
            |stream: &Stream| stream.used_at > 0 && stream.source == source && stream.stride == 0;
        self.streams
            .iter()
            .enumerate()
            .filter(|(_, stream)| mine(stream))
            .map(|(index, stream)| (distance(stream.last, page).abs(), index))
            .filter(|&(distance, _)| distance <= REACH)
            .min()
            .map(|(_, index)| index)
    }

    fn oldest(&self) -> usize {
        oldest(self.streams.iter().map(|stream| stream.used_at))
    }

    fn advance(&mut self, index: usize, page: u32) -> Option<Order> {
        let (clock, window_max) = (self.clock, self.window_max);
        let stream = &mut self.streams[index];
        let made = steps(stream, page)?;
        stream.last = page;
        stream.used_at = clock;
        stream.streak = stream.streak.saturating_add(made);
        stream.progress += made;
        stream.lead = stream.lead.saturating_sub(made);
        if stream.progress >= stream.window {
            stream.progress = 0;
            stream.window *= 2;
        }
        stream.window = stream.window.min(window_max);
        self.order(index)
    }

    /// Returns the pages to order for a stream, when half of its window is used.
    fn order(&mut self, index: usize) -> Option<Order> {
        let doubted = self.window_max == WINDOW_MIN;
        let stream = &mut self.streams[index];
        let proven = if doubted { STREAK_DOUBTED } else { STREAK_MIN };
        if stream.stride == 0 || stream.streak < proven || stream.lead * 2 > stream.window {
            return None;
        }
        let stride = i64::from(stream.stride);
        let first = i64::from(stream.last) + stride * (i64::from(stream.lead) + 1);
        let first = u32::try_from(first).ok()?;
        let count = stream.window.saturating_sub(stream.lead);
        stream.lead = stream.window;
        Some(Order {
            first,
            stride: stream.stride,
            count,
            chain: (stream.window / 4).clamp(1, CHAIN_MAX),
        })
    }
}

fn distance(from: u32, to: u32) -> i64 {
    i64::from(to) - i64::from(from)
}

/// Returns the number of steps of a stream to `page`, if it leads there.
fn steps(stream: &Stream, page: u32) -> Option<u32> {
    if stream.stride == 0 {
        return None;
    }
    let (delta, stride) = (distance(stream.last, page), i64::from(stream.stride));
    let steps = u32::try_from(delta / stride).ok()?;
    // Pages that are mapped along with another are not observed, so a stream may skip some.
    let most = stream.lead.max(1) + CHAIN_MAX;
    (delta % stride == 0 && (1..=most).contains(&steps)).then_some(steps)
}

fn oldest(ages: impl Iterator<Item = u64>) -> usize {
    ages.enumerate()
        .min_by_key(|&(_, age)| age)
        .map_or(0, |(index, _)| index)
}

#[cfg(test)]
mod tests;
