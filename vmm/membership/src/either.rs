//! Waiting for the first of two events.

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;

/// What came first.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Either<A, B> {
    First(A),
    Second(B),
}

/// Waits for the first of two; the other one is dropped. If both are ready, it is the first.
pub(crate) async fn either<A, B>(
    first: impl Future<Output = A>,
    second: impl Future<Output = B>,
) -> Either<A, B> {
    let (mut first, mut second) = (pin!(first), pin!(second));
    poll_fn(|context| {
        if let Poll::Ready(output) = first.as_mut().poll(context) {
            return Poll::Ready(Either::First(output));
        }
        second.as_mut().poll(context).map(Either::Second)
    })
    .await
}
