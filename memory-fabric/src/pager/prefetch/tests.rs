//! What is guessed, and what not.

use super::*;

fn order(first: u32, stride: i32, count: u32) -> Order {
    Order {
        first,
        stride,
        count,
        chain: 1,
    }
}

#[test]
fn a_run_downwards_is_fetched_upwards_and_ends_at_the_first_page() {
    assert_eq!(ascending(order(100, -1, 10)), order(91, 1, 10));
    assert_eq!(ascending(order(3, -1, 10)), order(0, 1, 4));
    assert_eq!(ascending(order(100, -2, 10)), order(100, -2, 10));
}

#[test]
fn skipping_ends_with_the_order_or_with_memory() {
    assert_eq!(skip(order(10, 4, 3), 2), Some(order(18, 4, 1)));
    assert_eq!(skip(order(10, 4, 3), 3), None);
    assert_eq!(skip(order(10, -8, 3), 2), None);
    assert_eq!(skip(order(u32::MAX - 1, 4, 3), 1), None);
}
