//! Switches that break the protocol on purpose: each one has to be found by the tests.
//!
//! Outside the tests of this crate a [`Switch`] has no content and no switch is on.

/// Which mutation is on.
#[cfg(test)]
pub(crate) type Switch = Option<Mutation>;

/// Which mutation is on: none.
#[cfg(not(test))]
pub(crate) type Switch = ();

/// Whether a mutation is on.
macro_rules! mutated {
    ($holder:expr, $mutation:ident) => {{
        #[cfg(test)]
        let is_on = $holder.switch == Some(crate::mutation::Mutation::$mutation);
        #[cfg(not(test))]
        let is_on = $holder.switch != ();
        is_on
    }};
}
pub(crate) use mutated;

/// A defect that the exploration or the simulation has to find.
#[cfg(test)]
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) enum Mutation {
    /// The directory serves the next request of a page without waiting for the unblock.
    SkipUnblock,
    /// The directory uses a page's number again.
    ReuseNumber,
    /// The directory does not invalidate one of the sharers.
    ForgetSharer,
    /// The directory answers an upgrade without data although the copy was invalidated meanwhile.
    TrustUpgrade,
    /// The directory answers a put while a transaction is in progress.
    PutWhileBusy,
    /// The directory does not note that the home has the bytes of a page that was zero.
    ForgetWriteBack,
    /// A page that the owner of a split block has counts as being at home.
    SplitForgetsOwner,
    /// Requests that a grant of their block made void are served.
    ServeVoid,
    /// A sharer drops its copy and does not acknowledge.
    DropAck,
    /// A sharer acknowledges before it unmaps.
    AckBeforeZap,
    /// The owner sends the page before it unmaps or write-protects it.
    CopyBeforeZap,
    /// The owner keeps the page writable after it gave a shared copy away.
    KeepWritable,
    /// A requester installs the page before all sharers acknowledged.
    IgnoreAcks,
    /// A requester never unblocks.
    NeverUnblock,
    /// A requester unblocks as soon as it is granted the page.
    UnblockOnGrant,
    /// A requester unblocks at once, however often it lost the page before it progressed.
    NoHold,
    /// The owner drops a dirty page that has readers as if it were clean.
    DropOwned,
    /// The owner frees a page when it puts it back, not when that is answered.
    FreeOnPut,
    /// The owner says that a dirty page is clean.
    CallItClean,
    /// A node asks again for a page before the drop of its old copy was sent.
    DropWithoutWait,
    /// A write-back is not cancelled by a touch.
    IgnoreTouch,
    /// A runtime starts a second write-back of a page before the first is answered, and takes its
    /// answer.
    MixWriteBacks,
    /// A runtime forgets write-backs on their way when their page has been lost and its block comes back.
    ForgetWritesOnWay,
    /// A home stores what it is sent, whatever the number.
    HomeTakesAll,
    /// A lane delivers what it has delivered before.
    NoDuplicateFilter,
    /// Survivors of a crash go on waiting.
    NoFence,
    /// A held page is never released.
    NeverEndHold,
    /// A thread that collects pages one after the other holds all of them as long as it does so.
    UnboundedGang,
    /// The patience with a thread follows the usual wait without a bound.
    UnboundedPatience,
    /// How long a gang may run contains the holds of the nodes that it was collected from.
    CountHolds,
    /// A thread collects only if it runs for less than a unit between two pages, on slow hosts as well.
    StepOfUnit,
    /// What a halted vCPU got stays held.
    HoldWhileHalted,
    /// The holds of the pages that one access collects end one by one.
    NoGang,
    /// What was requested ahead is not held with what its thread waited for.
    ForgetAhead,
    /// A thread that waits for its next page keeps none of those that it has.
    NoPatience,
    /// A message leaves before the changes of merged tables are confirmed.
    NoSettling,
    /// A message leaves before merged tables are compared with their twins.
    NoFenceOfTables,
    /// A holder gives up a merged table without what changed since its last comparison.
    ForgetLastChanges,
    /// A table that nothing links any longer stays merged.
    KeepUnlinked,
    /// A change is confirmed before what it unlinks is ordinary memory.
    ConfirmEarly,
    /// A thread keeps the starvation token when it has progressed, and when its time is over.
    KeepToken,
}
