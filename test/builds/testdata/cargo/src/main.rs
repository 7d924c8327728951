fn text(n: u32) -> String {
    itoa::Buffer::new().format(n).to_string()
}

fn main() {
    println!("{}", text(42));
}

#[test]
fn formats() {
    assert_eq!(text(42), "42");
}
